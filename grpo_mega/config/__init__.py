"""What a run is: dataclasses per room, rules that name the fix, and the way from the command line to them."""
