"""The lines of datasets: parsing, names of fields, and values as tables leave them."""
