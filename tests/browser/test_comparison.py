"""The page about two runs: it answers without scripts, and its views share one selection."""

from __future__ import annotations

from typing import Any

from reading import chosen, column, count_said, hash_of, plot_place, tensor_title

from support.pages import HOSTILE


def test_the_answer_is_there_without_scripts(visit: Any, runs: Any, births: Any) -> None:
    page = visit(runs.comparison, scripts=False)
    assert "The runs part in side (Scaled)" in page.locator("#banner .sentence").inner_text()
    assert "120 diverged" in page.locator("#header .counts").inner_text()
    assert page.locator("#births li").count() == len(births)
    assert page.locator("#environment table").is_visible() and page.locator("#definitions dl").is_visible()
    assert not page.locator("#next-birth").is_visible()


def test_it_opens_at_the_first_divergence(visit: Any, runs: Any, births: Any) -> None:
    page = visit(runs.comparison)
    assert tensor_title(page).startswith("side output 0 · forward · step 0 · rank 0")
    assert "born here" in chosen(page) and "side" in chosen(page)
    assert page.locator(".tree [aria-current=true]").inner_text().startswith("side")
    assert count_said(page) == 76


def test_clicking_a_birth_in_the_plot_shows_its_drill_down(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    page.mouse.click(*plot_place(page, "layers.1.up\noutput 0 · diverged · ◀ born here"))
    assert tensor_title(page).startswith("layers.1.up output 0 · forward · step 0")
    assert "born here" in chosen(page)
    assert hash_of(page)["row"].isdigit()


def test_dragging_across_the_plot_zooms_and_selects_nothing(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    before, ring = page.url, page.locator(".order-panel .ring")
    assert ring.is_visible()
    over = page.locator(".order-panel .u-over").bounding_box()
    page.mouse.move(over["x"] + over["width"] * 0.5, over["y"] + 50)
    page.mouse.down()
    page.mouse.move(over["x"] + over["width"] * 0.8, over["y"] + 60, steps=4)
    page.mouse.up()
    assert page.url == before and not ring.is_visible()  # the selection is outside now
    page.mouse.dblclick(over["x"] + over["width"] * 0.5, over["y"] + 50)
    assert ring.is_visible()


def test_the_drill_down_has_every_part(visit: Any, runs: Any, births: Any) -> None:
    page = visit(runs.comparison)
    panel = page.locator("#tensor")
    for title in (
        "Tolerance needed to pass",
        "Both sides",
        "Values",
        "Where they differ",
        "Distance in ULP",
        "Worst elements",
    ):
        assert panel.get_by_role("heading", name=title).is_visible(), title
    assert panel.locator(".bars .edge.reference").count() == panel.locator(".bars .edge.candidate").count() == 1
    assert panel.locator(".error-map canvas").bounding_box()["width"] > 100
    worst = panel.locator(".worst tbody tr").first.locator("td").all_inner_texts()
    first = births[0].difference
    assert worst[0] == f"[{', '.join(map(str, first.max_abs_index))}]"
    assert abs(float(worst[1]) - first.reference_value) < 1e-6 and abs(float(worst[2]) - first.candidate_value) < 1e-6
    assert "1.00e-2" in panel.locator(".measures").first.inner_text()


def test_summaries_say_that_elements_are_not_known(visit: Any, runs: Any) -> None:
    page = visit(runs.summaries)
    assert "only the summary of the reference's tensor was kept" in page.locator("#tensor").inner_text()
    assert "~" in page.locator("#tensor .measures").first.inner_text()
    assert page.locator("#tensor .worst").count() == 0


def test_sorting_goes_down_up_and_back(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison, "step=all&rank=all")
    heading = page.locator(".table-panel").get_by_role("button", name="rel. error")
    before = column(page, 1)
    heading.click()
    assert page.locator(".table-panel [aria-sort=descending]").inner_text().startswith("rel. error")
    errors = [float(text) for text in column(page, 3)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.01
    heading.click()
    assert {float(text) for text in column(page, 3)} == {0.0}
    heading.click()
    assert column(page, 1) == before and hash_of(page).get("sort") is None
    page.locator(".table-panel").get_by_role("button", name="module").click()
    assert column(page, 1)[0] == "(root)"


def test_filters_keep_matching_rows(visit: Any, runs: Any, pairs: Any) -> None:
    page = visit(runs.comparison, "step=all&rank=all")
    assert count_said(page) == len(pairs)
    page.locator("#filter").fill("layers.1 up OUTPUT")
    found = [pair for pair in pairs if pair["module"] == "layers.1.up" and "output" in pair["kind"]]
    assert set(column(page, 1)) == {"layers.1.up"} and count_said(page) == len(found)
    page.get_by_label("failing only").check()
    assert count_said(page) == sum(pair["status"] == "diverged" for pair in found) < len(found)
    page.locator("#filter").fill("no such thing")
    assert count_said(page) == 0 and column(page, 0) == []
    page.locator("#filter").fill("")
    assert count_said(page) == sum(pair["status"] == "diverged" for pair in pairs)
    page.get_by_label("step", exact=True).select_option("1")
    page.get_by_label("rank", exact=True).select_option("1")
    assert hash_of(page) == {"step": "1", "rank": "1", "failing": "1"}


def test_the_hash_restores_the_view(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    page.get_by_label("step", exact=True).select_option("1")
    page.locator(".tree").get_by_text("layers", exact=True).click()
    page.locator("#filter").fill("grad")
    page.locator(".table-panel").get_by_role("button", name="rel. error").click()
    page.locator(".table-panel .grid-body .grid-row:visible").nth(3).click()
    page.get_by_role("tab", name="Environment").click()

    def view(of: Any) -> Any:
        return (
            hash_of(of),
            column(of, 1),
            chosen(of),
            tensor_title(of),
            of.locator("[aria-selected=true][role=tab]").inner_text(),
        )

    again = visit(runs.comparison, page.url.partition("#")[2])
    assert view(again) == view(page)
    assert hash_of(again).keys() == {"step", "row", "module", "text", "sort", "tab"}
    again.evaluate("location.hash = 'step=2'")  # an address that is edited by hand
    again.locator(".table-panel output", has_text="76 rows").wait_for()
    assert again.locator("#filter").input_value() == ""


def test_nonsense_in_the_hash_does_no_harm(visit: Any, runs: Any) -> None:
    page = visit(
        runs.comparison, "step=99&row=123456789&module=nowhere&sort=-nothing&tab=none&trend=x&__proto__=1&rank=%00"
    )
    assert count_said(page) == 0
    assert not page.locator("#tensor").is_visible()


def test_modules_narrow_and_are_coloured_by_step(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    tree = page.get_by_role("tree")
    before = tree.get_by_text("head").locator("..").inner_text()
    page.get_by_label("step", exact=True).select_option("2")
    assert tree.get_by_text("head").locator("..").inner_text() != before
    tree.locator("li[title^='layers.1 ']").click()
    assert all(name.startswith("layers.1") for name in column(page, 1))
    assert page.locator(".scope-module").inner_text().startswith("layers.1")
    tree.locator("li[title^='layers.1 ']").press("ArrowLeft")
    assert tree.locator("li[title^='layers.1.up']").count() == 0
    page.locator(".scope-module").click()
    assert count_said(page) == 76


def test_a_click_on_ranks_and_layers_narrows_to_both(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    canvas = page.locator(".heat-panel canvas")
    box = canvas.bounding_box()
    canvas.click(position={"x": 56 + (box["width"] - 56) * 3.5 / 6, "y": box["height"] - 5})
    assert (hash_of(page)["rank"], hash_of(page)["module"]) == ("1", "layers.1")
    assert all(name.startswith("layers.1") for name in column(page, 1))


def test_names_are_text(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison, "text=img")
    assert column(page, 1)[0] == f"layers.0.{HOSTILE}"
    page.locator(".table-panel .grid-body .grid-row:visible").first.click()
    assert page.locator("#tensor h2").inner_text() == f"layers.0.{HOSTILE}"
    assert page.locator("img").count() == 0
    page.get_by_role("tree").get_by_text("onerror").first.click()
    assert HOSTILE in page.locator(".scope-module").inner_text()


def test_tabs_hold_trend_unmatched_environment_and_definitions(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    assert page.locator("#panel-trend canvas").is_visible()
    page.get_by_label("statistic").select_option(label="standard deviation")
    assert page.locator("#panel-trend .legend").inner_text().split() == ["━", "reference", "╍", "candidate"]
    page.get_by_role("tab", name="Trend").press("ArrowRight")
    assert page.get_by_role("tab", name="Unmatched (12)").get_attribute("aria-selected") == "true"
    assert "candidate" in page.locator("#panel-unmatched .grid-row:visible").nth(1).inner_text()
    page.get_by_role("tab", name="Environment").click()
    assert "torch" in page.locator("#panel-environment").inner_text()
    page.get_by_role("tab", name="Meaning of each number").click()
    assert "ULP" in page.locator("#panel-definitions").inner_text()
    page.get_by_role("tab", name="Births").click()
    page.locator("#births li").nth(2).get_by_role("button", name="show").click()
    assert tensor_title(page).startswith("layers.1.up output 0")


def test_it_can_be_used_on_a_narrow_screen(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison, wide=800)
    assert page.evaluate("document.documentElement.scrollWidth") <= 800
    assert page.locator("#tensor").is_visible() and page.locator(".table-panel").is_visible()
