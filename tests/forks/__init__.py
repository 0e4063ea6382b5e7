"""Jobs in forks of one process that has imported what is heavy: the imports are paid once for all tests of a module or a folder."""
