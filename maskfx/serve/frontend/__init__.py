"""Requests from their arrival to their answer."""
