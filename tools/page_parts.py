"""Parts of pages that tools write, between two comments."""


def between(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with a text in place of what stands between two marks."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{text}{end}{after}"
