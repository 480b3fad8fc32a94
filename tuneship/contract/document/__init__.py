"""The OpenAPI document, made from the declarations."""
