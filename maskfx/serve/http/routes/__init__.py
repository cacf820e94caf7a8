"""The routes of the HTTP app.

May import: the other files of `http/`, serve's shared files. Begin with `images.py`.
"""
