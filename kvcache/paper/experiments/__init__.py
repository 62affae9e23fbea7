"""What the notebooks show: each module returns the tidy tables of one question; nothing here draws."""
