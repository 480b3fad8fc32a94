"""The commands of people, beside those that the declarations make."""
