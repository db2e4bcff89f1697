"""Graders of structured answers: tables, formulas, and tests of pages."""
