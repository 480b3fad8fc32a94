"""The dossier of a release: one file with what was decided and from what, which anybody can verify later.

`contents.py` gathers it, `archive.py` packs it, `checks.py` decides everything again. No text of the data is in it.
"""
