//! The table of both runs, as the page docs/kfdtest.md.

use std::fmt::Write;

use super::output::Outcome;

/// One test in both runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Group and name, with a point between.
    pub test: String,
    /// On the model with the package set's own thunk.
    pub native: Outcome,
    /// On our stack.
    pub loopback: Outcome,
}

/// What the page says of the run besides its results.
#[derive(Debug, Clone)]
pub struct About {
    /// The day, as year-month-day.
    pub date: String,
    /// Commit of this repository.
    pub commit: String,
    /// Where the binary is from and how it was built.
    pub binary: String,
    /// GPU profile of the model.
    pub profile: String,
    /// Limit for each test in seconds.
    pub limit: u64,
}

impl Row {
    /// Whether it passes natively and not on our stack.
    pub fn is_worse(&self) -> bool {
        self.native.is_pass() && !self.loopback.is_pass()
    }

    fn group(&self) -> &str {
        self.test.split_once('.').map_or(self.test.as_str(), |(group, _)| group)
    }

    fn name(&self) -> &str {
        self.test.split_once('.').map_or("", |(_, name)| name)
    }

    fn note(&self) -> String {
        let (native, loopback) = (self.native.note(), self.loopback.note());
        if native == loopback {
            native.to_owned()
        } else {
            let part = |place: &str, note: &str| {
                if note.is_empty() { String::new() } else { format!("{place}: {note}") }
            };
            let parts = [part("native", native), part("loop-back", loopback)];
            parts.iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join("; ")
        }
    }
}

/// The groups in the order of their first tests, with their rows.
fn groups(rows: &[Row]) -> Vec<(&str, Vec<&Row>)> {
    let mut groups: Vec<(&str, Vec<&Row>)> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|(group, _)| *group == row.group()) {
            Some((_, members)) => members.push(row),
            None => groups.push((row.group(), vec![row])),
        }
    }
    groups
}

/// One line with the numbers.
pub fn summary(rows: &[Row]) -> String {
    let count = |what: fn(&&Row) -> bool| rows.iter().filter(what).count();
    format!(
        "{} tests: {} pass natively, {} of these pass in loop-back; natively {} skip and {} do not pass; \
         {} pass in loop-back only",
        rows.len(),
        count(|row| row.native.is_pass()),
        count(|row| row.native.is_pass() && row.loopback.is_pass()),
        count(|row| matches!(row.native, Outcome::Skipped(_))),
        count(|row| !row.native.is_pass() && !matches!(row.native, Outcome::Skipped(_))),
        count(|row| !row.native.is_pass() && row.loopback.is_pass()),
    )
}

/// The table of `rows` alone.
pub fn table(rows: &[&Row]) -> String {
    let mut text = "| test | native | loop-back | note |\n| --- | --- | --- | --- |\n".to_owned();
    for row in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            row.name(),
            row.native,
            row.loopback,
            row.note().replace('|', "\\|")
        );
    }
    text
}

/// The whole page.
pub fn page(about: &About, rows: &[Row]) -> String {
    let About { date, commit, binary, profile, limit } = about;
    let mut text = format!(
        "# kfdtest\n\n\
         <!-- Written by `cargo xtask kfdtest --write`. Do not edit: run it again. -->\n\n\
         Upstream's test suite of the KFD interface, test by test: with Debian's thunk on the model, and with ours in \
         loop-back. Nothing of kfdtest is in this repository; `cargo xtask kfdtest --binary PATH` runs a binary that \
         you have built yourself.\n\n\
         - Date: {date}; this repository at {commit}.\n\
         - The binary: {binary}\n\
         - Native: Debian 13's libhsakmt on the model `{profile}`, which is preloaded into the program.\n\
         - Loop-back: our `libhsakmt.so.1` in its place, with `VIRTIO_KFD_REGISTER=adopt`, against `vhost-user-kfd --kfd \
         model:{profile}` and its workers.\n\
         - Each test runs in a process and a process group of its own, with a limit of {limit} s; the daemon is \
         started again after each test that does not pass.\n\n\
         **pass**: the test ran to its end and all its checks held. **skip**: it returned early of its own will, which \
         googletest counts as passed and this page does not. **fail**: a check failed; the note has its place. \
         **crash**: a signal ended it. **time-out**: it was killed at its limit. A test that does not pass natively \
         says nothing about our stack: most of these create queues, and the model runs none yet.\n\n\
         {}.\n\n",
        summary(rows)
    );
    text.push_str("| group | tests | pass natively | of these pass in loop-back | skip natively | other |\n");
    text.push_str("| --- | ---: | ---: | ---: | ---: | ---: |\n");
    let groups = groups(rows);
    for (group, members) in &groups {
        let count = |what: fn(&&&Row) -> bool| members.iter().filter(what).count();
        let passed = count(|row| row.native.is_pass());
        let skipped = count(|row| matches!(row.native, Outcome::Skipped(_)));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {group} | {} | {passed} | {} | {skipped} | {} |",
            members.len(),
            count(|row| row.native.is_pass() && row.loopback.is_pass()),
            members.len().saturating_sub(passed).saturating_sub(skipped),
        );
    }
    text.push_str("\n## Pass natively and not in loop-back\n\n");
    let worse: Vec<&Row> = rows.iter().filter(|row| row.is_worse()).collect();
    if worse.is_empty() {
        text.push_str("None.\n");
    }
    for row in worse {
        let _ = writeln!(text, "- {}: {}, {}", row.test, row.loopback, row.note());
    }
    for (group, members) in &groups {
        let _ = write!(text, "\n## {group}\n\n{}", table(members));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(test: &str, native: Outcome, loopback: Outcome) -> Row {
        Row { test: test.to_owned(), native, loopback }
    }

    fn rows() -> Vec<Row> {
        let fail = |place: &str| Outcome::Failed(place.to_owned());
        vec![
            row("A.One", Outcome::Passed, Outcome::Passed),
            row("A.Two/0", Outcome::Passed, fail("t.cpp:3")),
            row("B.One", Outcome::Skipped("x|y".to_owned()), Outcome::Skipped("x|y".to_owned())),
            row("A.Three", fail("t.cpp:4"), Outcome::TimedOut(String::new())),
            row("B.Two", fail("t.cpp:4"), Outcome::Passed),
        ]
    }

    #[test]
    fn the_page_has_every_test_once_in_its_group() {
        let about = About {
            date: "2020-01-02".to_owned(),
            commit: "abc".to_owned(),
            binary: "built so.".to_owned(),
            profile: "gfx906".to_owned(),
            limit: 60,
        };
        let text = page(&about, &rows());
        let (head, tables) = text.split_once("\n## A\n").unwrap();
        assert!(head.contains("2020-01-02; this repository at abc."), "{head}");
        assert!(head.contains("| A | 3 | 2 | 1 | 0 | 1 |"), "{head}");
        assert!(head.contains("| B | 2 | 0 | 0 | 1 | 1 |"), "{head}");
        assert!(head.contains("- A.Two/0: fail, loop-back: t.cpp:3"), "{head}");
        let (a, b) = tables.split_once("\n## B\n").unwrap();
        assert!(a.contains("| Three | fail | time-out | native: t.cpp:4 |"), "{a}");
        assert!(a.contains("| Two/0 | pass | fail | loop-back: t.cpp:3 |"), "{a}");
        assert!(b.contains("| One | skip | skip | x\\|y |"), "{b}");
        assert_eq!(
            tables.lines().filter(|line| line.starts_with("| T") || line.starts_with("| O")).count(),
            5
        );
    }

    #[test]
    fn only_what_passes_natively_can_be_worse() {
        let worse: Vec<_> = rows().into_iter().filter(Row::is_worse).map(|row| row.test).collect();
        assert_eq!(worse, ["A.Two/0"]);
        assert_eq!(
            summary(&rows()),
            "5 tests: 2 pass natively, 1 of these pass in loop-back; natively 1 skip and 2 do not pass; \
             1 pass in loop-back only"
        );
    }
}
