"""Pictures as files and as pixels, in processes of their own."""
