"""Recipes: chains of runs, pools of samples and data sets chosen from them, such as all of DeepSeek-R1.

A recipe is a file of `configs/recipe`. Every stage is a command that a user could type; its output (product) is used by
later stages by name. A report for each stage has the checksums of its inputs and product. It is the only state of a
recipe: the stages resume by themselves.
"""
