//! What a test run came to: read from nextest's report or from the output of cargo test.
//!
//! A test that cannot run prints a line `SKIP: reason` (or `skipped: reason`) and returns; to the test runner it has
//! passed, here it counts as skipped.

use std::fmt;

use anyhow::{Context, Result};
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

/// How the line of a skipped test begins, in upper or lower case.
const SKIP: &[&str] = &["skip", "skipped"];

/// Numbers of tests, and why some were skipped.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tests that ran and passed.
    pub passed: usize,
    /// Tests that failed.
    pub failed: usize,
    /// Tests that did not run.
    pub skipped: usize,
    /// One line for each test that did not run.
    pub reasons: Vec<String>,
    /// Names of tests that failed, and passed when they ran once more; they are among the passed ones.
    pub again: Vec<String>,
}

impl Tally {
    /// Adds another run's numbers.
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.reasons.extend(other.reasons);
        self.again.extend(other.again);
    }

    /// Where more than `most` tests needed a second run, that is no accident: they count as failed.
    pub fn allow_again(&mut self, most: usize) {
        let again = self.again.len();
        if again > most {
            self.passed = self.passed.saturating_sub(again);
            self.failed += again;
        }
    }

    /// Counts one more result.
    pub fn count(&mut self, passed: bool) {
        if passed { self.passed += 1 } else { self.failed += 1 }
    }

    fn skip(&mut self, test: &str, reason: &str) {
        self.skipped += 1;
        self.reasons.push(format!("{test}: {}", reason.trim()));
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Reads the JUnit report that nextest writes.
pub fn junit(text: &str) -> Result<Tally> {
    let mut tally = Tally::default();
    let mut reader = Reader::from_str(text);
    let mut test = String::new();
    let mut outcome = Outcome::Passed;
    let mut reason = None;
    let mut output = String::new();
    let mut in_output = false;
    let mut in_attempt = false;
    loop {
        match reader.read_event().context("the test report")? {
            Event::Eof => return Ok(tally),
            Event::Start(element) => match element.name().into_inner() {
                "testcase" => {
                    test = test_name(&element);
                    (outcome, reason) = (Outcome::Passed, None);
                }
                "failure" | "error" => outcome = Outcome::Failed,
                "skipped" => outcome = Outcome::Skipped,
                // An attempt before the last one, with its output.
                "flakyFailure" | "flakyError" => {
                    in_attempt = true;
                    tally.again.push(test.clone());
                }
                "rerunFailure" | "rerunError" => in_attempt = true,
                "system-out" | "system-err" => in_output = !in_attempt,
                _ => {}
            },
            Event::Empty(element) => match element.name().into_inner() {
                "testcase" => tally.passed += 1,
                "failure" | "error" => outcome = Outcome::Failed,
                "skipped" => outcome = Outcome::Skipped,
                "flakyFailure" | "flakyError" => tally.again.push(test.clone()),
                _ => {}
            },
            Event::Text(piece) if in_output => output.push_str(&piece),
            Event::GeneralRef(name) if in_output => {
                output.push_str(quick_xml::escape::resolve_predefined_entity(&name).unwrap_or_default());
            }
            Event::CData(piece) if in_output => output.push_str(&piece),
            Event::End(element) => match element.name().into_inner() {
                "system-out" | "system-err" => {
                    in_output = false;
                    if reason.is_none() {
                        reason = output.lines().find_map(skip_reason).map(str::to_owned);
                    }
                    output.clear();
                }
                "flakyFailure" | "flakyError" | "rerunFailure" | "rerunError" => in_attempt = false,
                "testcase" => match (outcome, &reason) {
                    (Outcome::Failed, _) => tally.failed += 1,
                    (Outcome::Skipped, _) => tally.skip(&test, "left out by the test runner"),
                    (Outcome::Passed, Some(reason)) => tally.skip(&test, reason),
                    (Outcome::Passed, None) => tally.passed += 1,
                },
                _ => {}
            },
            _ => {}
        }
    }
}

/// The reason in the line of a skipped test.
fn skip_reason(line: &str) -> Option<&str> {
    let (word, reason) = line.trim().split_once(':')?;
    SKIP.iter().any(|skip| skip.eq_ignore_ascii_case(word)).then_some(reason)
}

#[derive(Debug, Clone, Copy)]
enum Outcome {
    Passed,
    Failed,
    Skipped,
}

fn test_name(element: &BytesStart<'_>) -> String {
    let attribute = |name: &str| {
        let value = element.try_get_attribute(name).ok().flatten();
        value.map(|value| value.value.into_owned()).unwrap_or_default()
    };
    format!("{} {}", attribute("classname"), attribute("name"))
}

/// Reads the output of `cargo test` (with `--nocapture`, so that skip lines are in it).
pub fn libtest(text: &str) -> Tally {
    let mut tally = Tally::default();
    for line in text.lines() {
        if let Some(result) = line.trim().strip_prefix("test result: ") {
            let number = |word: &str| {
                let part = result.split(['.', ';']).find_map(|part| part.trim().strip_suffix(word));
                part.and_then(|number| number.trim().parse::<usize>().ok()).unwrap_or(0)
            };
            tally.passed += number("passed");
            tally.failed += number("failed");
            tally.skipped += number("ignored");
        } else {
            // The runner may have begun the line with the test's name.
            let (test, rest) = line.split_once(" ... ").unwrap_or(("test", line));
            if let Some(reason) = skip_reason(rest) {
                tally.skip(test.trim_start_matches("test "), reason);
            }
        }
    }
    tally.passed = tally.passed.saturating_sub(tally.reasons.len());
    tally
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shape of a report of cargo-nextest 0.9.
    #[test]
    fn a_nextest_report_is_counted() {
        let text = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="4" failures="1" errors="0" uuid="x" timestamp="t" time="0.1">
    <testsuite name="kfd-abi" tests="4" disabled="0" errors="0" failures="1">
        <testcase name="a::plain" classname="kfd-abi" timestamp="t" time="0.01"/>
        <testcase name="a::talks" classname="kfd-abi" timestamp="t" time="0.01">
            <system-out>running 1 test
it did not SKIP: anything
</system-out>
            <system-err>nothing</system-err>
        </testcase>
        <testcase name="a::skips" classname="kfd-abi" timestamp="t" time="0.01">
            <system-out>running 1 test
SKIP: no compiler &amp; no headers
test a::skips ... ok
</system-out>
        </testcase>
        <testcase name="a::fails" classname="kfd-abi" timestamp="t" time="0.01">
            <failure type="test failure with exit code 101">panicked</failure>
            <system-out>SKIP: too late</system-out>
        </testcase>
    </testsuite>
</testsuites>"#;
        let tally = junit(text).unwrap();
        assert_eq!(tally.to_string(), "2 passed, 1 failed, 1 skipped");
        let [reason] = tally.reasons.as_slice() else { panic!("{:?}", tally.reasons) };
        assert_eq!(reason, "kfd-abi a::skips: no compiler & no headers");
    }

    /// Shape of a report of cargo-nextest 0.9 with `retries = 1`.
    #[test]
    fn tests_that_needed_a_second_run_are_named_and_bounded() {
        let text = r#"<testsuites><testsuite name="t">
        <testcase name="a" classname="t" time="0.01">
            <flakyFailure timestamp="t" time="0.02" type="test failure with exit code 101">
                <system-out>SKIP: of an attempt that failed</system-out>
            </flakyFailure>
            <system-out>all right</system-out>
        </testcase>
        <testcase name="b" classname="t" time="0.01">
            <failure type="test failure with exit code 101">panicked</failure>
            <rerunFailure timestamp="t" time="0.02" type="test failure with exit code 101">
                <system-err>panicked</system-err>
            </rerunFailure>
        </testcase>
        <testcase name="c" classname="t" time="0.01"/>
</testsuite></testsuites>"#;
        let mut tally = junit(text).unwrap();
        assert_eq!(tally.again, ["t a"]);
        tally.allow_again(1);
        assert_eq!(tally.to_string(), "2 passed, 1 failed, 0 skipped");
        tally.allow_again(0);
        assert_eq!(tally.to_string(), "1 passed, 2 failed, 0 skipped");
    }

    /// Output of rustc 1.95's test runner.
    #[test]
    fn output_of_cargo_test_is_counted() {
        let text = "running 3 tests\ntest a ... SKIP: no GPU\nok\ntest b ... ok\nSKIPPED: no network\ntest c ... ok\n\n\
                    test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\
                    test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s\n";
        let tally = libtest(text);
        assert_eq!(tally.to_string(), "5 passed, 2 failed, 3 skipped");
        assert_eq!(tally.reasons, ["a: no GPU", "test: no network"]);
    }
}
