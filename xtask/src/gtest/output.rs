//! What test programs print (googletest's lines, and those of kfdtest and rocrtst that say why a test does nothing), read
//! into outcomes.

use std::fmt;

/// How one test ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It ran to its end and everything that it checks was so.
    Passed,
    /// It ended early of its own will and checked little or nothing; googletest calls that passed.
    Skipped(String),
    /// A check failed; the first such place, or what is known.
    Failed(String),
    /// The process was killed by a signal of its own doing; the signal's name and the place of a check that failed before.
    Crashed(String),
    /// It was killed at its limit; the place of a check that failed before, if any.
    TimedOut(String),
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It left with this status.
    Status(i32),
    /// A signal killed it.
    Signal(i32),
    /// It was killed at its limit.
    Limit,
}

impl Outcome {
    /// Whether it counts as passed.
    pub fn is_pass(&self) -> bool {
        matches!(self, Self::Passed)
    }

    /// What there is to say about it besides its name.
    pub fn note(&self) -> &str {
        match self {
            Self::Passed => "",
            Self::Skipped(note) | Self::Failed(note) | Self::Crashed(note) | Self::TimedOut(note) => note,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Passed => "pass",
            Self::Skipped(_) => "skip",
            Self::Failed(_) => "fail",
            Self::Crashed(_) => "crash",
            Self::TimedOut(_) => "time-out",
        })
    }
}

/// Groups whose tests may return early without a word, so that their passes cannot be told from skips, and why they do.
const SILENT: &[(&str, &str)] = &[("KFDPCSamplingTest.", "PC sampling is not offered")];

/// The full names of the tests in the output of `--gtest_list_tests`, those that are disabled only if they are asked for.
pub fn names(text: &str, disabled: bool) -> Vec<String> {
    let mut names = Vec::new();
    let mut group = "";
    for line in text.lines() {
        // A comment after the name shows the parameter of a parametrised test.
        let name = line.split_whitespace().next().unwrap_or_default();
        if line.starts_with(char::is_whitespace) {
            let full = format!("{group}{name}");
            if !group.is_empty() && (disabled || !full.contains("DISABLED_")) {
                names.push(full);
            }
        } else {
            // Anything else that is printed between the names is no group's.
            group = if name.ends_with('.') { name } else { "" };
        }
    }
    names
}

/// The outcome of a process that ran `test` alone, from its standard output and standard error in one.
pub fn outcome(test: &str, text: &str, end: End) -> Outcome {
    let failure = first_failure(text);
    let place = failure.clone().unwrap_or_default();
    match end {
        End::Limit => return Outcome::TimedOut(place),
        End::Signal(number) => {
            let name = signal_name(number);
            return Outcome::Crashed(if place.is_empty() { name } else { format!("{name} after {place}") });
        }
        End::Status(_) => {}
    }
    if let Some(place) = failure {
        return Outcome::Failed(place);
    }
    let mut lines = text.lines();
    let says = |mark: &str| {
        // Another process or another stream may have begun the line.
        text.lines()
            .filter_map(|line| line.split_once(mark))
            .any(|(_, rest)| rest.trim_start().starts_with(test))
    };
    if says("[  FAILED  ]") {
        return Outcome::Failed("no check's place is printed".to_owned());
    }
    let silent = SILENT.iter().find(|(group, _)| test.starts_with(group)).map(|(_, reason)| *reason);
    let reason = lines.find_map(skip_reason).or(silent);
    match (end, reason) {
        (End::Status(0), Some(reason)) => Outcome::Skipped(reason.to_owned()),
        (End::Status(0), None) if says("[       OK ]") => Outcome::Passed,
        (End::Status(0), None) if says("[  SKIPPED ]") => Outcome::Skipped("skips itself".to_owned()),
        (End::Status(status), _) => Outcome::Failed(format!("status {status} without a result")),
        // Both have been dealt with above.
        (End::Signal(_) | End::Limit, _) => Outcome::Failed("killed".to_owned()),
    }
}

/// The place of the first check that failed, as file and line, and that it is the creation of a queue, if it is.
fn first_failure(text: &str) -> Option<String> {
    let mut lines = text.lines();
    let place = loop {
        let line = lines.next()?;
        if let Some(place) = line.trim_end().strip_suffix(": Failure") {
            break place.rsplit('/').next().unwrap_or(place).trim_start().to_owned();
        }
    };
    let expression = lines.next().unwrap_or_default();
    let queue = expression.contains("ueue") && expression.contains("Create");
    Some(if queue { format!("{place}, creates a queue") } else { place })
}

/// Why a test skips itself, if this line of kfdtest's log says that it does. The words are ours.
fn skip_reason(line: &str) -> Option<&'static str> {
    /// What the line has, and what it comes to; the first that fits counts.
    const REASONS: &[(&[&str], &str)] = &[
        (
            &[
                "two gpus",
                "2 gpus",
                "two large bar",
                "two svm",
                "multi-dgpu",
                "peer-accessible",
                "2nd gpu",
                "two nodes",
            ],
            "needs two GPUs",
        ),
        (&["requires apu"], "needs an APU"),
        (&["svm api", "svm is not supported"], "SVM is not offered"),
        (&["pc sampling"], "PC sampling is not offered"),
        (&["debug api"], "the debugger interface is not offered"),
        (&["gws"], "GWS is not offered"),
        (&["hsa_debug"], "runs only with HSA_DEBUG"),
        (&["series asics", "later asics", "other asics", "family id"], "for another kind of GPU"),
        (&["large bar"], "needs VRAM that the CPU sees"),
        (&["mmio"], "no page of GPU registers"),
        (&["no vram"], "no VRAM is reported"),
        (&["render node", "debugfs"], "needs a file of the kernel that is not there"),
        (&["system memory"], "needs more system memory"),
        (&["privileged block"], "no privileged counters"),
        (&["ras features"], "RAS is not offered"),
        (&["driver not loaded"], "needs a test module in the kernel"),
        (&["ioctl"], "needs a newer KFD"),
    ];
    let line = line.to_ascii_lowercase();
    let skips = [
        "skipping test",
        "skip test",
        "skipping the test",
        "test is skipped",
        "svm api not supported",
        "svm is not supported",
    ];
    if !skips.iter().any(|words| line.contains(words)) && !line.contains("not loaded, skipping") {
        return None;
    }
    let known = REASONS.iter().find(|(words, _)| words.iter().any(|word| line.contains(word)));
    Some(known.map_or("skips itself", |(_, reason)| reason))
}

fn signal_name(number: i32) -> String {
    let name = match number {
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        15 => "SIGTERM",
        _ => return format!("signal {number}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shape of the list that googletest 1.6 and 1.12 print (googletest's documentation, "Listing Test Names").
    #[test]
    fn a_list_of_tests_is_read() {
        let text = "[          ] Failed to open a parameter\nKFDASMTest.\n  AssembleShaders\n\
                    KFDCWSRTest.\n  InterruptRestore\n  BasicTest/0  # GetParam() = (1, 10)\n\
                    KFDEvictTest.\n  DISABLED_Slow\nDISABLED_Group.\n  Test\n";
        assert_eq!(
            names(text, false),
            ["KFDASMTest.AssembleShaders", "KFDCWSRTest.InterruptRestore", "KFDCWSRTest.BasicTest/0"]
        );
        assert_eq!(names(text, true).len(), 5);
        assert!(names("", true).is_empty());
        assert!(names("  Orphan\n", true).is_empty());
    }

    const HEAD: &str = "[==========] Running 1 test from 1 test case.\n[ RUN      ] G.Test\n";

    #[test]
    fn a_test_that_ran_passes() {
        let text = format!(
            "{HEAD}[          ] a line of the log\n[       OK ] G.Test (6 ms)\n[  PASSED  ] 1 test.\n"
        );
        assert_eq!(outcome("G.Test", &text, End::Status(0)), Outcome::Passed);
        // The log goes another way than the results, and a line may begin in the middle of another.
        let mixed = format!("{HEAD}[          ] a line [       OK ] G.Test (6 ms)\n");
        assert_eq!(outcome("G.Test", &mixed, End::Status(0)), Outcome::Passed);
        assert_eq!(outcome("G.Test", &text, End::Limit), Outcome::TimedOut(String::new()));
        assert_eq!(outcome("G.Test", &text, End::Signal(6)), Outcome::Crashed("SIGABRT".to_owned()));
    }

    #[test]
    fn a_test_that_returns_early_is_no_pass() {
        let skipped = |line: &str| {
            let text = format!("{HEAD}{line}\n[       OK ] G.Test (1 ms)\n[  PASSED  ] 1 test.\n");
            outcome("G.Test", &text, End::Status(0))
        };
        for (line, reason) in [
            ("[          ] Skipping test: At least two GPUs are required.", "needs two GPUs"),
            ("[          ] Skipping test: Test requires APU.", "needs an APU"),
            ("[          ] SVM API not supported", "SVM is not offered"),
            ("[          ] Skip test as debug API not supported", "the debugger interface is not offered"),
            ("[----------] Test is skipped for some reason", "skips itself"),
        ] {
            assert_eq!(skipped(line), Outcome::Skipped(reason.to_owned()), "{line}");
        }
        // A part left out is no test left out.
        assert_eq!(skipped("[          ] Not testing local memory"), Outcome::Passed);
        let silent = "[       OK ] KFDPCSamplingTest.BasicTest (1 ms)\n";
        assert_eq!(
            outcome("KFDPCSamplingTest.BasicTest", silent, End::Status(0)),
            Outcome::Skipped("PC sampling is not offered".to_owned())
        );
        let text = format!("{HEAD}[  SKIPPED ] G.Test (0 ms)\n[  PASSED  ] 0 tests.\n");
        assert_eq!(outcome("G.Test", &text, End::Status(0)), Outcome::Skipped("skips itself".to_owned()));
    }

    #[test]
    fn a_failure_names_its_place() {
        let text = format!(
            "{HEAD}/a/b/src/T.cpp:492: Failure\nValue of: (queue.Create(node))\n  Actual: 1\nExpected: SUCCESS\n\
             /a/b/src/T.cpp:500: Failure\nValue of: x\n[  FAILED  ] G.Test (7 ms)\n[  PASSED  ] 0 tests.\n"
        );
        let failed = Outcome::Failed("T.cpp:492, creates a queue".to_owned());
        assert_eq!(outcome("G.Test", &text, End::Status(1)), failed);
        let crashed = Outcome::Crashed("SIGSEGV after T.cpp:492, creates a queue".to_owned());
        assert_eq!(outcome("G.Test", &text, End::Signal(11)), crashed);
        // A check that fails in a forked child counts, whatever the parent says.
        let child = format!("{HEAD}c.cpp:3: Failure\nValue of: x\n[       OK ] G.Test (7 ms)\n");
        assert_eq!(outcome("G.Test", &child, End::Status(0)), Outcome::Failed("c.cpp:3".to_owned()));
        // One that skips after a check has failed has failed.
        let both = format!("{HEAD}c.cpp:3: Failure\nx\n[          ] Skipping test: No VRAM found.\n");
        assert_eq!(outcome("G.Test", &both, End::Status(1)), Outcome::Failed("c.cpp:3".to_owned()));
    }

    #[test]
    fn no_result_is_no_pass() {
        for status in [0, 3] {
            let failed = Outcome::Failed(format!("status {status} without a result"));
            assert_eq!(outcome("G.Test", HEAD, End::Status(status)), failed);
        }
        // The OK of another test is not this one's.
        let text = "[       OK ] H.Test (7 ms)\n";
        assert!(!outcome("G.Test", text, End::Status(0)).is_pass());
    }
}
