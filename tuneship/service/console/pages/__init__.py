"""The pages, each a module with a template of its name. `page.py` finds them."""
