"""The report of an inspection, in every form."""
