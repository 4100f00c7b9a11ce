"""Tables and figures from Timelines."""
