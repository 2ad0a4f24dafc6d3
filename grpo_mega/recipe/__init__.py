"""Recipes: chains of runs, of pools of samples and of data sets chosen from them, such as the whole of DeepSeek-R1.

A recipe is a file of `configs/recipe`. Every stage is a command that a user could type, and what it makes (its product)
goes into the commands of later stages by name. A report for each stage says what it read and made, by checksum. It is
all that a recipe remembers: the stages resume by themselves.
"""
