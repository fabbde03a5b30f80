"""What every other group needs: the machine, files, text. It imports no other group."""
