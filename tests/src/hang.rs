//! What processes do that should have come to an end: for the message of a test that gave up on one.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use crate::host::descendants;

/// Most threads that are told of; a message is for people.
const MOST: usize = 80;

/// Each thread of all processes that this one has started, and theirs: process, thread, name, state, CPU time in ticks (user
/// and system), the kernel's function that it sleeps in, and its system call with arguments, stack pointer and program counter
/// (`/proc/PID/task/TID/{stat,wchan,syscall}`, proc(5)).
pub fn threads_of_descendants() -> String {
    let mut text = String::new();
    let mut threads = 0usize;
    for pid in descendants(std::process::id()) {
        let tasks = format!("/proc/{pid}/task");
        let Ok(entries) = fs::read_dir(&tasks) else { continue };
        let ids: BTreeSet<u32> =
            entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
        for id in ids {
            threads = threads.saturating_add(1);
            if threads <= MOST {
                let _ = writeln!(text, "{pid} {}", thread(&Path::new(&tasks).join(id.to_string()), id));
            }
        }
    }
    if threads > MOST {
        let _ = writeln!(text, "and {} more", threads.saturating_sub(MOST));
    }
    text
}

fn thread(task: &Path, id: u32) -> String {
    let read = |name: &str| fs::read_to_string(task.join(name)).unwrap_or_default().trim().to_owned();
    let stat = read("stat");
    // The name is in parentheses, and may have any characters.
    let fields: Vec<&str> = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').collect();
    let field = |number: usize| fields.get(number).copied().unwrap_or("?");
    let (state, user, system) = (field(0), field(11), field(12));
    format!("{id} {} {state} {user}+{system} {} {}", read("comm"), read("wchan"), read("syscall"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use crate::Keeper;

    #[test]
    fn a_process_that_sleeps_is_told_of_by_name_and_call() {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("sleep");
        command.arg("600");
        let limit = Duration::from_secs(3);
        let kept = Keeper::start(command, &directory.path().join("log"), limit).unwrap();
        let pid = kept.pid();
        let threads = kept.threads_at_limit();
        assert!(kept.wait().is_some());
        let told = threads.get().unwrap();
        assert!(told.lines().any(|line| line.starts_with(&format!("{pid} {pid} sleep S "))), "{told}");
    }
}
