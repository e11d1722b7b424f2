"""The loaded versions of models, and loading, reloading and unloading them.

catalog.py           which versions exist and which one serves; writes the version table
loaded_versions.py   what tokenizer and scheduler report of each version
loader.py            the commands, and the changes in progress
load_settings.py     what a version is loaded with; checks of its file
load_steps.py        the steps of one load
self_test.py         the test before a version serves
"""
