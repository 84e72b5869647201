//! What the tests with a guest share: where the sources of their programs are, who runs them there, and parts that are run one
//! after the other, since a guest on an emulated CPU takes seconds to boot.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Instant;

use crate::guest::{Command, Guest};

/// Environment variable: only the parts are run in whose name this is, to try one by hand.
pub const PARTS_VARIABLE: &str = "VIRTIO_KFD_TEST_PARTS";

/// udev's rules for GPUs, without udev, and the directory of the tests' programs, as root.
pub const OPEN_TO_USERS: &str = "chmod 666 /dev/dri/renderD*; chmod 755 /opt/virtio-kfd";

/// A part of a test, with its name.
pub type Part<S> = (&'static str, fn(&S));

/// A file or directory of the tests' package, where the tests run, which need not be where they were built.
pub fn package_path(relative: &str) -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    package.join(relative)
}

/// A shell command for the user without privileges.
pub fn user(script: &str) -> Command {
    Command::new("su").args(&["-s", "/bin/sh", "user", "-c", script])
}

/// What the guest's kernel complained of since its start, one line each.
///
/// # Errors
/// The guest does not answer.
pub fn kernel_complaints(guest: &Guest) -> anyhow::Result<String> {
    let ask = Command::shell("dmesg | grep -E 'BUG|Oops|WARNING|hung|freeing invalid' || true");
    Ok(guest.run(&ask)?.checked()?.text())
}

/// Runs the parts in their order, each whatever became of those before it. Returns the names of those that failed, after each of
/// which `clean_up` is called.
pub fn run_parts<S>(stack: &S, parts: &[Part<S>], clean_up: impl Fn(&S)) -> Vec<&'static str> {
    let only = std::env::var(PARTS_VARIABLE).unwrap_or_default();
    let mut failed = Vec::new();
    for (name, part) in parts.iter().filter(|(name, _)| name.contains(&only)) {
        let begin = Instant::now();
        println!("{name}");
        let passed = catch_unwind(AssertUnwindSafe(|| part(stack))).is_ok();
        println!("  {} ({:?})", if passed { "ok" } else { "FAILED" }, begin.elapsed());
        if !passed {
            failed.push(*name);
            clean_up(stack);
        }
    }
    failed
}

#[cfg(test)]
#[allow(clippy::panic, reason = "a part that fails")]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_part_that_fails_keeps_no_other_from_running() {
        let ran = Cell::new(0);
        let cleaned = Cell::new(0);
        let parts: &[Part<Cell<u32>>] = &[
            ("first", |ran| ran.set(ran.get() + 1)),
            ("second", |_| panic!("on purpose")),
            ("third", |ran| ran.set(ran.get() + 10)),
        ];
        let failed = run_parts(&ran, parts, |_| cleaned.set(cleaned.get() + 1));
        assert_eq!((failed, ran.get(), cleaned.get()), (vec!["second"], 11, 1));
    }
}
