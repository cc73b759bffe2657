"""An attack and a protection that another package brings to Rasura."""
