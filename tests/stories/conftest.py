def pytest_collection_modifyitems(config, items):
    """With --seed, play that story and nothing else; without, all but that."""
    wanted = config.getoption("--seed") is not None
    one = [item for item in items if item.name == "test_one_story"]
    if one:
        items[:] = one if wanted else [item for item in items if item not in one]
