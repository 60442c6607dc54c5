"""Tests of export.layouts."""
