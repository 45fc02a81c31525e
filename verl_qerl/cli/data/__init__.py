"""`data`: question sets in verl's parquet schema, with verl's prompts, so that verl's own rewards apply."""
