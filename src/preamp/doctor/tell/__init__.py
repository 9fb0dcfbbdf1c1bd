"""Reports: the verdict, the findings, and what was counted and compared, from records. Nothing here needs torch."""
