"""Data sets: files of texts and folders of images in, examples out; the notes and images that the demo uses."""
