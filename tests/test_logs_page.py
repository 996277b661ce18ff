"""docs/logs.md runs as it stands, and its refusals are those that one gets."""

import pathlib
import re

import pyarrow as pa
import pyarrow.parquet
import pytest

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "logs.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.S)):
        exec(compile(block, f"docs/logs.md, block {number + 1}", "exec"), names)
    said = capsys.readouterr().out
    assert "60000 rows read, of 4000 users." in said and "private vocabulary" in said
    assert 100 < names["log"].num_items <= 200 and names["plan"].accountant.epsilon() <= 6.0
    answer = names["items"].of(names["answer"]["ids"].numpy()[0])
    assert len(set(answer)) == 5 and not {None, "sku-30", "sku-31"} & set(answer)
    recall = float(re.search(r"'recall@10': (0\.\d+)", said)[1])
    assert recall > 0.4, recall  # 0.7 to 0.9 were seen; ten of 200 items cannot hold so much by popularity


def test_its_table_says_what_is_said(tmp_path, monkeypatch):
    import tfdp_rec

    monkeypatch.chdir(tmp_path)
    pyarrow.parquet.write_table(pa.table({"user_id": ["a"], "sku": ["b"], "ts": [1]}), "log.parquet")
    with pytest.raises(ValueError) as refusal:
        tfdp_rec.data.Interactions.read("log.parquet", user="user_id", item="item_id")
    assert f"`{refusal.value}`" in PAGE
