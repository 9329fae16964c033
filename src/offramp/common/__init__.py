"""What every room uses: files, the console, names, seeds, the device, images. Imports nothing else of offramp."""
