"""The routes of the HTTP app.

May import: serve/http/*.py, serve/*.py, maskfx. Begin with `images.py`.
"""
