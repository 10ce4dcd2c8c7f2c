"""What a run leaves to look at: metrics, and the page made of them."""
