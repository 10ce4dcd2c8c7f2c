"""What a method will cost on a link, before it runs: a timeline simulator, the papers' tables and an advisor."""
