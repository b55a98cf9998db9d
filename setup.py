from setuptools import setup

setup()  # configured in pyproject.toml
