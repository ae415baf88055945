"""The package as users get it: the files of wheel and sdist, and the wheel without extras."""
