"""A folder for PYTHONPATH, in which Python finds `apex`. `preamp run` puts it there, for all processes of a script."""
