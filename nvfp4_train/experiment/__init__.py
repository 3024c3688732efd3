"""Running a question: arms x seeds trained as pairs, compared, and reported.  Floor 5 of the library."""
