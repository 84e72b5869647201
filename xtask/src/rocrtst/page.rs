//! The table of both runs, as the page docs/rocrtst.md.

use super::causes::{CAUSES, Known as Cause, known, stale};
use crate::gtest::rows::{self, Known, Row, summary};

/// Tests whose outcome changes from run to run natively too, so that a failure says nothing about our stack: they start and
/// end the runtime from many threads at once.
const FLAKY: &str = "rocrtstFunc.Concurrent_Init";

/// What is known of them.
const FLAKY_BECAUSE: &str = "threads start the runtime and shut it down at once, and the outcome changes from run to run: on a loaded \
                             machine the shutdown test passed 28 times of 30 natively and 27 of 30 in loop-back, and failed in both \
                             at concurrent_init_shutdown.cc:63 or crashed. ROCr starts in two threads at once: a program that starts it from \
                             eight failed natively about one time in three, and in the model's trace a second thread's RUNTIME_ENABLE \
                             (EBUSY) comes while the first one reads the topology";

/// Why tests end otherwise on our stack, where that is known and stays so for now.
const KNOWN: Known = &[(
    "rocrtstPerf.DISABLED_Memory_Async_Copy_NUMA",
    "memory of the application's own is not lent to GPUs here (docs/limits.md), so that the test ends before its copy",
)];

/// What the page says of the run besides its results.
#[derive(Debug, Clone)]
pub struct About {
    /// The day, as year-month-day.
    pub date: String,
    /// Commit of this repository.
    pub commit: String,
    /// Version of the tests' package and of the runtime.
    pub version: String,
    /// Which tests, as a filter of googletest.
    pub filter: String,
    /// GPU profile of the model.
    pub profile: String,
    /// Limit for each test in seconds.
    pub limit: u64,
    /// How many tests ran at a time.
    pub jobs: usize,
    /// How many times the limit a test has on our stack if it ends natively.
    pub patience: u32,
}

/// Whether a test's outcome changes from run to run natively.
pub fn is_flaky(test: &str) -> bool {
    test.starts_with(FLAKY)
}

/// The whole page.
pub fn page(about: &About, rows: &[Row]) -> String {
    let About { date, commit, version, filter, profile, limit, jobs, patience } = about;
    format!(
        "# rocrtst\n\n\
         <!-- Written by `cargo xtask rocrtst --write`. Do not edit: run it again. -->\n\n\
         ROCr's own tests, test by test: with AMD's thunk, which is inside the runtime, on the model, and on our \
         `/dev/kfd` in loop-back.\n\n\
         - Date: {date}; this repository at {commit}.\n\
         - The tests: rocrtst64 of Debian's libhsa-runtime64-tests {version} (experimental), with libhsa-runtime64-1 of \
         the same version, both unmodified. libamd_smi, which the tests are linked to and call only to print clocks and \
         temperatures, is replaced by one that says \"not supported\".\n\
         - Its tests that match `{filter}`, disabled ones among them (`DISABLED_`), each alone.\n\
         - Native: on the model `{profile}`, which is preloaded into the program.\n\
         - Loop-back: on `libkfd_preload.so`, against `vhost-user-kfd --kfd model:{profile}` and its \
         workers; a test's processes share one VM (`kfd-loopback-vm`).\n\
         - Each test runs in a process and a process group of its own, which is killed at the end, with a limit of \
         {limit} s, on our stack {patience} times as much for a test that ends natively; tests at a time: {jobs}. The daemon is started again after \
         each test that does not pass.\n\
         - In a QEMU guest, through `kfd-run`, five of these tests run in CI and twenty more where asked for \
         (`tests/tests/qemu_rocrtst.rs`).\n\n\
         **pass**: the test ran to its end and all its checks held. **skip**: it returned early of its own will. **fail**: \
         a check failed; the note has its place. **crash**: a signal ended it. **time-out**: it was killed at its limit. A \
         test that does not pass natively says nothing about our stack; `{FLAKY}*` may fail in either place.\n\n\
         {}.\n\n{}{}",
        summary(rows),
        rows::tables(rows, KNOWN),
        unpassed(rows)
    )
}

/// The tests that do not pass natively, each with the cause if it is known, and the causes that do not hold any more.
fn unpassed(rows: &[Row]) -> String {
    let line = |row: &Row| match known(row, CAUSES) {
        _ if is_flaky(&row.test) => format!("- {row}: {FLAKY_BECAUSE}\n"),
        Cause::Cause(why) => format!("- {row}: {why}\n"),
        Cause::Otherwise(ends) => format!("- {row}: **not explained**; what is known explains `{ends}`\n"),
        Cause::Nothing => format!("- {row}: **not explained**\n"),
    };
    let mut lines: Vec<String> = rows.iter().filter(|row| !row.native.is_pass()).map(line).collect();
    if lines.is_empty() {
        lines.push("None.\n".to_owned());
    }
    let mut text = format!("\n## Do not pass natively\n\n{}", lines.concat());
    let stale = stale(rows, CAUSES);
    if !stale.is_empty() {
        text.push_str("\n## Pass natively, and were known to fail\n\n");
        stale.iter().for_each(|cause| text.push_str(&format!("- {}: {}\n", cause.test, cause.why)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gtest::rows::tests::rows;

    #[test]
    fn the_page_tells_how_it_was_run_and_what_does_not_pass() {
        let about = About {
            date: "2020-01-02".to_owned(),
            commit: "abc".to_owned(),
            version: "7.2".to_owned(),
            filter: "A.*:B.*".to_owned(),
            profile: "gfx906".to_owned(),
            limit: 60,
            jobs: 1,
            patience: 2,
        };
        let text = page(&about, &rows());
        assert!(text.contains("- Date: 2020-01-02; this repository at abc."), "{text}");
        assert!(text.contains("libhsa-runtime64-tests 7.2 ("), "{text}");
        assert!(text.contains("| A | 3 | 2 | 1 | 0 | 1 |"), "{text}");
        let (_, last) = text.split_once("\n## Do not pass natively\n\n").unwrap();
        assert_eq!(last.lines().count(), 3, "{last}");
        assert!(is_flaky("rocrtstFunc.Concurrent_Init_Test") && !is_flaky("rocrtstFunc.Concurrent_Shutdown"));
    }
}
