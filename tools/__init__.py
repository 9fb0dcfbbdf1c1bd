"""What the workshop needs and users do not: documents written from results, goals judged."""
