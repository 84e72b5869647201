//! The table of both runs, as the page docs/kfdtest.md.

use crate::gtest::rows::{self, Known, Row, has_guest, summary};

/// Why tests end otherwise on our stack, where that is known and stays so for now.
const KNOWN: Known = &[(
    "KFDMemoryTest.PtraceAccess",
    "no debugger reaches the library's host memory in a guest, docs/limits.md",
)];

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
         - Loop-back: our `libhsakmt.so.1` in its place, with `VIRTIO_KFD_REGISTER=adopt-variables`, against `kfd-loopback-vm`, the \
         VM of all processes of a test, `vhost-user-kfd --kfd model:{profile}` and its workers.\n{guest}\
         - On our stack with `VIRTIO_KFD_HDP=trap` as well.\n\
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
    text.push_str(&rows::tables(rows, KNOWN));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gtest::output::Outcome;
    use crate::gtest::rows::tests::{fail, row, rows};

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
}
