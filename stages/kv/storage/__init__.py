"""Full pages on disk.

page_file.py          layout of the file, and a reader for other processes
page_file_writer.py   cells and extents of the open file
disk_store.py         which pages stay, pauses after errors, compaction
threaded_store.py     a thread for the disk, and the pages that wait for it
persist.py            which pages are saved to the state directory, and when
prune.py              removal of files that are no longer served
"""
