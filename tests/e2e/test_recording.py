"""The recording of the first minute in the documents."""

from xml.etree import ElementTree

from tools.pictures import IMAGES, record_first_minute

MAX_RECORDING_BYTES = 60_000


def read_lines(content: bytes) -> list[tuple[str, str]]:
    """Return the class and text of each line, up to the first dot: processors round fractions differently."""
    texts = ElementTree.fromstring(content).iter("{http://www.w3.org/2000/svg}text")
    return [(text.attrib["class"], "".join(text.itertext()).partition(".")[0]) for text in texts]


def test_stored_recording_shows_the_same_session() -> None:
    file, content = record_first_minute()
    assert len(content) <= MAX_RECORDING_BYTES
    lines = read_lines(content)
    assert lines == read_lines((IMAGES / file).read_bytes())
    assert [text for kind, text in lines if kind == "command"][::3] == ["$ make serve", "$ preblock verify minilm"]
