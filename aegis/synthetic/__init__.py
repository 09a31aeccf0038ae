"""Models of any shape with random weights, whose routing has the structure of real ones."""
