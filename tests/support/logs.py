"""What was logged here: others' loggers speak when they like, e.g. when an earlier test's garbage is collected."""


def own_records(caplog):
    """Give the records of this project's loggers."""
    return [record for record in caplog.records if record.name.startswith("radixrt")]
