//! The outcomes of many tests as tables of a page.

use std::fmt::{self, Write};

use super::output::Outcome;

/// Tests, with why they end otherwise on our stack, or do not pass anywhere.
pub type Known = &'static [(&'static str, &'static str)];

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
pub fn has_guest(rows: &[Row]) -> bool {
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

/// The numbers of each group, what ends otherwise on our stack with what is known about it, and the tests of each group.
pub fn tables(rows: &[Row], known: Known) -> String {
    let mut text = String::new();
    let with_guest = has_guest(rows);
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
    section(&mut text, "Pass natively and not on our stack", known, rows.iter().filter(|row| row.is_worse()));
    section(
        &mut text,
        "Do not pass natively and end otherwise or elsewhere on our stack",
        known,
        rows.iter().filter(|row| row.is_other()),
    );
    for (group, members) in &groups {
        let _ = write!(text, "\n## {group}\n\n{}", table(members));
    }
    text
}

/// A section that lists rows, each with what is known about it.
pub fn section<'a>(text: &mut String, title: &str, known: Known, rows: impl Iterator<Item = &'a Row>) {
    let line = |row: &Row| match known.iter().find(|(test, _)| *test == row.test) {
        Some((_, why)) => format!("- {row}: {why}\n"),
        None => format!("- {row}\n"),
    };
    let lines: Vec<String> = rows.map(line).collect();
    let body = if lines.is_empty() { "None.\n".to_owned() } else { lines.concat() };
    // Writing to a string cannot fail.
    let _ = write!(text, "\n## {title}\n\n{body}");
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A row without a guest.
    pub fn row(test: &str, native: Outcome, loopback: Outcome) -> Row {
        Row { test: test.to_owned(), native, loopback, guest: None }
    }

    /// A failure at a place.
    pub fn fail(place: &str) -> Outcome {
        Outcome::Failed(place.to_owned())
    }

    /// One of each kind.
    pub fn rows() -> Vec<Row> {
        vec![
            row("A.One", Outcome::Passed, Outcome::Passed),
            row("A.Two/0", Outcome::Passed, fail("t.cpp:3")),
            row("B.One", Outcome::Skipped("x|y".to_owned()), Outcome::Skipped("x|y".to_owned())),
            row("A.Three", fail("t.cpp:4"), Outcome::TimedOut(String::new())),
            row("B.Two", fail("t.cpp:4"), Outcome::Passed),
        ]
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
