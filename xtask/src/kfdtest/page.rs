//! The table of both runs, as the page docs/kfdtest.md.

use std::fmt::{self, Write};

use super::output::Outcome;

/// Why tests end otherwise on our stack, where that is known and stays so for now.
const KNOWN: &[(&str, &str)] = &[
    (
        "KFDMemoryTest.PtraceAccess",
        "no debugger reaches the library's host memory in a guest, docs/limits.md",
    ),
    (
        "KFDMemoryTest.MemoryRegister",
        "registers variables on the stack, which adoption refuses, docs/limits.md",
    ),
    ("KFDIPCTest.BasicTest", "registers a variable on the stack, which adoption refuses, docs/limits.md"),
    ("KFDMemoryTest.HostHdpFlush", "no page of GPU registers is offered to guests"),
];

/// One test in both runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Group and name, with a point between.
    pub test: String,
    /// On the model with the package set's own thunk.
    pub native: Outcome,
    /// On our stack.
    pub loopback: Outcome,
    /// On our stack in a QEMU guest, if it was run there.
    pub guest: Option<Outcome>,
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
    /// Which tests, as a filter of googletest.
    pub filter: String,
    /// GPU profile of the model.
    pub profile: String,
    /// Limit for each test in seconds.
    pub limit: u64,
}

impl Row {
    /// Whether it passes natively and not everywhere on our stack.
    pub fn is_worse(&self) -> bool {
        self.native.is_pass() && !self.ours().all(Outcome::is_pass)
    }

    /// Whether it does not pass natively, and ends otherwise, or elsewhere, on our stack.
    pub fn is_other(&self) -> bool {
        !self.native.is_pass() && self.ours().any(|outcome| *outcome != self.native)
    }

    /// The outcomes on our stack.
    fn ours(&self) -> impl Iterator<Item = &Outcome> {
        std::iter::once(&self.loopback).chain(&self.guest)
    }

    fn group(&self) -> &str {
        self.test.split_once('.').map_or(self.test.as_str(), |(group, _)| group)
    }

    fn name(&self) -> &str {
        self.test.split_once('.').map_or("", |(_, name)| name)
    }

    /// What there is to say: once if it is the same everywhere, else for each place.
    fn note(&self) -> String {
        let note = self.native.note();
        if self.ours().all(|outcome| outcome.note() == note) {
            return note.to_owned();
        }
        let mut parts = Vec::new();
        let guest = self.guest.as_ref().map(|outcome| ("guest", outcome));
        for (place, outcome) in
            [("native", &self.native), ("loop-back", &self.loopback)].into_iter().chain(guest)
        {
            if !outcome.note().is_empty() {
                parts.push(format!("{place}: {}", outcome.note()));
            }
        }
        parts.join("; ")
    }
}

impl fmt::Display for Row {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: native {}, loop-back {}", self.test, self.native, self.loopback)?;
        if let Some(guest) = &self.guest {
            write!(formatter, ", guest {guest}")?;
        }
        let note = self.note();
        if note.is_empty() { Ok(()) } else { write!(formatter, " ({note})") }
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

/// Whether any test was run in a guest.
fn has_guest(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.guest.is_some())
}

fn passes_in_guest(row: &Row) -> bool {
    row.guest.as_ref().is_some_and(Outcome::is_pass)
}

/// One line with the numbers.
pub fn summary(rows: &[Row]) -> String {
    let count = |what: fn(&Row) -> bool| rows.iter().filter(|row| what(row)).count();
    let guest = count(|row| row.native.is_pass() && passes_in_guest(row));
    format!(
        "{} tests: {} pass natively; of these pass in loop-back {}{}; natively {} skip and {} do not pass",
        rows.len(),
        count(|row| row.native.is_pass()),
        count(|row| row.native.is_pass() && row.loopback.is_pass()),
        if has_guest(rows) { format!(" and in the guest {guest}") } else { String::new() },
        count(|row| matches!(row.native, Outcome::Skipped(_))),
        count(|row| !row.native.is_pass() && !matches!(row.native, Outcome::Skipped(_))),
    )
}

/// The tests of one group.
fn table(rows: &[&Row]) -> String {
    let guest = rows.iter().any(|row| row.guest.is_some());
    let (head, line) = if guest { (" guest |", " --- |") } else { ("", "") };
    let mut text = format!("| test | native | loop-back |{head} note |\n| --- | --- | --- |{line} --- |\n");
    for row in rows {
        let guest = match &row.guest {
            Some(outcome) => format!(" {outcome} |"),
            None if guest => " |".to_owned(),
            None => String::new(),
        };
        let note = row.note().replace('|', "\\|");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {} | {} | {} |{guest} {note} |", row.name(), row.native, row.loopback);
    }
    text
}

/// The whole page.
pub fn page(about: &About, rows: &[Row]) -> String {
    let About { date, commit, binary, filter, profile, limit } = about;
    let with_guest = has_guest(rows);
    let guest = if with_guest {
        "- Guest: the same library in a QEMU guest with Debian 13's kernel and C library, with the same variable, over \
         virtio-gpu.\n"
    } else {
        ""
    };
    let mut text = format!(
        "# kfdtest\n\n\
         <!-- Written by `cargo xtask kfdtest --write`. Do not edit: run it again. -->\n\n\
         Upstream's test suite of the KFD interface, test by test: with Debian's thunk on the model, and with ours in \
         loop-back. Nothing of kfdtest is in this repository; `cargo xtask kfdtest --binary PATH` runs a binary that \
         you have built yourself.\n\n\
         - Date: {date}; this repository at {commit}.\n\
         - The binary: {binary}\n\
         - Its tests that match `{filter}`, each alone.\n\
         - Native: Debian 13's libhsakmt on the model `{profile}`, which is preloaded into the program.\n\
         - Loop-back: our `libhsakmt.so.1` in its place, with `VIRTIO_KFD_REGISTER=adopt`, against `vhost-user-kfd --kfd \
         model:{profile}` and its workers.\n{guest}\
         - Each test runs in a process and a process group of its own, with a limit of {limit} s, on our stack three \
         times as much for a test that ends natively; the daemon is \
         started again after each test that does not pass.\n\n\
         **pass**: the test ran to its end and all its checks held. **skip**: it returned early of its own will, which \
         googletest counts as passed and this page does not. **fail**: a check failed; the note has its place. \
         **crash**: a signal ended it. **time-out**: it was killed at its limit. A test that does not pass natively \
         says nothing about our stack; the note \"creates a queue\" means that it stopped where it creates one.\n\n\
         {}.\n\n",
        summary(rows)
    );
    let (head, line) = if with_guest { (" and in the guest |", " ---: |") } else { ("", "") };
    let _ = writeln!(
        text,
        "| group | tests | pass natively | of these pass in loop-back |{head} skip natively | other |\n\
         | --- | ---: | ---: | ---: |{line} ---: | ---: |"
    );
    let groups = groups(rows);
    for (group, members) in &groups {
        let count = |what: fn(&Row) -> bool| members.iter().filter(|row| what(row)).count();
        let passed = count(|row| row.native.is_pass());
        let skipped = count(|row| matches!(row.native, Outcome::Skipped(_)));
        let in_guest = count(|row| row.native.is_pass() && passes_in_guest(row));
        let in_guest = if with_guest { format!(" {in_guest} |") } else { String::new() };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {group} | {} | {passed} | {} |{in_guest} {skipped} | {} |",
            members.len(),
            count(|row| row.native.is_pass() && row.loopback.is_pass()),
            members.len().saturating_sub(passed).saturating_sub(skipped),
        );
    }
    section(&mut text, "Pass natively and not on our stack", rows.iter().filter(|row| row.is_worse()));
    section(
        &mut text,
        "Do not pass natively and end otherwise or elsewhere on our stack",
        rows.iter().filter(|row| row.is_other()),
    );
    for (group, members) in &groups {
        let _ = write!(text, "\n## {group}\n\n{}", table(members));
    }
    text
}

fn section<'a>(text: &mut String, title: &str, rows: impl Iterator<Item = &'a Row>) {
    let line = |row: &Row| match KNOWN.iter().find(|(test, _)| *test == row.test) {
        Some((_, why)) => format!("- {row}: {why}\n"),
        None => format!("- {row}\n"),
    };
    let lines: Vec<String> = rows.map(line).collect();
    let body = if lines.is_empty() { "None.\n".to_owned() } else { lines.concat() };
    // Writing to a string cannot fail.
    let _ = write!(text, "\n## {title}\n\n{body}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(test: &str, native: Outcome, loopback: Outcome) -> Row {
        Row { test: test.to_owned(), native, loopback, guest: None }
    }

    fn fail(place: &str) -> Outcome {
        Outcome::Failed(place.to_owned())
    }

    fn rows() -> Vec<Row> {
        vec![
            row("A.One", Outcome::Passed, Outcome::Passed),
            row("A.Two/0", Outcome::Passed, fail("t.cpp:3")),
            row("B.One", Outcome::Skipped("x|y".to_owned()), Outcome::Skipped("x|y".to_owned())),
            row("A.Three", fail("t.cpp:4"), Outcome::TimedOut(String::new())),
            row("B.Two", fail("t.cpp:4"), Outcome::Passed),
        ]
    }

    fn about() -> About {
        About {
            date: "2020-01-02".to_owned(),
            commit: "abc".to_owned(),
            binary: "built so.".to_owned(),
            filter: "A.*:B.*".to_owned(),
            profile: "gfx906".to_owned(),
            limit: 60,
        }
    }

    #[test]
    fn the_page_has_every_test_once_in_its_group() {
        let text = page(&about(), &rows());
        let (head, tables) = text.split_once("\n## A\n").unwrap();
        assert!(head.contains("2020-01-02; this repository at abc."), "{head}");
        assert!(head.contains("tests that match `A.*:B.*`"), "{head}");
        assert!(head.contains("| A | 3 | 2 | 1 | 0 | 1 |"), "{head}");
        assert!(head.contains("| B | 2 | 0 | 0 | 1 | 1 |"), "{head}");
        let (worse, other) = head.split_once("\n## Do not pass").unwrap();
        assert!(
            worse.ends_with("stack\n\n- A.Two/0: native pass, loop-back fail (loop-back: t.cpp:3)\n"),
            "{worse}"
        );
        assert!(
            other.contains("- A.Three: native fail, loop-back time-out (native: t.cpp:4)\n- B.Two: "),
            "{other}"
        );
        let (a, b) = tables.split_once("\n## B\n").unwrap();
        assert!(a.contains("| Three | fail | time-out | native: t.cpp:4 |"), "{a}");
        assert!(a.contains("| Two/0 | pass | fail | loop-back: t.cpp:3 |"), "{a}");
        assert!(b.contains("| One | skip | skip | x\\|y |"), "{b}");
        let lines = tables.lines().filter(|line| line.starts_with("| T") || line.starts_with("| O"));
        assert_eq!(lines.count(), 5);
    }

    #[test]
    fn the_guest_has_a_column_when_it_was_run() {
        let mut rows = rows();
        for row in &mut rows {
            row.guest = Some(row.native.clone());
        }
        let text = page(&about(), &rows);
        assert!(text.contains("| A | 3 | 2 | 1 | 2 | 0 | 1 |"), "{text}");
        assert!(text.contains("| Two/0 | pass | fail | pass | loop-back: t.cpp:3 |"), "{text}");
        assert!(text.contains("\n- Guest: "), "{text}");
        // Its failure counts too.
        rows.truncate(1);
        let known = row("KFDMemoryTest.PtraceAccess", Outcome::Passed, fail("t.cpp:3"));
        assert!(page(&about(), &[known]).contains("(loop-back: t.cpp:3): no debugger reaches"));
        assert!(!rows.iter().any(Row::is_worse));
        for row in &mut rows {
            row.guest = Some(fail("t.cpp:5"));
        }
        assert!(rows.iter().all(Row::is_worse));
    }

    #[test]
    fn only_what_passes_natively_can_be_worse() {
        let names = |what: fn(&Row) -> bool| -> Vec<String> {
            rows().into_iter().filter(what).map(|row| row.test).collect()
        };
        assert_eq!(names(Row::is_worse), ["A.Two/0"]);
        assert_eq!(names(Row::is_other), ["A.Three", "B.Two"]);
        assert_eq!(
            summary(&rows()),
            "5 tests: 2 pass natively; of these pass in loop-back 1; natively 1 skip and 2 do not pass"
        );
    }
}
