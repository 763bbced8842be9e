"""`pocket`: a tiny trained Wan2.2 text-to-video checkpoint, its grammar, data and judges."""
