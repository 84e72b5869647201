//! Programs of the system that the build needs: found by name, run with their failures reported.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};

/// Debian packages that bring the programs which this project calls.
const PROVIDERS: &[(&str, &str)] = &[
    ("apt-cache", "apt"),
    ("apt-config", "apt"),
    ("apt-get", "apt"),
    ("c++", "g++"),
    ("cc", "gcc libc6-dev"),
    ("dpkg", "dpkg"),
    ("dpkg-deb", "dpkg"),
    ("git", "git"),
    ("objcopy", "binutils"),
];

/// Checks that all `programs` are on the search path.
///
/// # Errors
/// [`Error::MissingTools`] names all that are missing and the one command that installs them.
pub fn require(programs: &[&str]) -> Result<()> {
    let missing: Vec<&str> = programs.iter().copied().filter(|program| find(program).is_none()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut packages: Vec<&str> = missing
        .iter()
        .map(|program| {
            PROVIDERS.iter().find(|(name, _)| name == program).map_or(*program, |(_, package)| *package)
        })
        .collect();
    packages.dedup();
    Err(Error::MissingTools { missing: missing.join(", "), install: install_command(&packages) })
}

/// The command that installs Debian `packages`.
pub fn install_command(packages: &[&str]) -> String {
    format!("sudo apt-get install --no-install-recommends {}", packages.join(" "))
}

/// Looks a program up in `PATH`, and in the directories of system programs that an ordinary user's `PATH` may lack.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .map(|directory| directory.join(program))
        .find(|candidate| is_executable(candidate))
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

/// Runs a command to its end and returns its standard output.
///
/// # Errors
/// [`Error::Command`] with the last lines of its output when it cannot be started or fails.
pub fn output(command: &mut Command) -> Result<String> {
    let name = describe(command);
    let done = command.stdin(Stdio::null()).output().map_err(|error| Error::Command {
        command: name.clone(),
        status: error.to_string(),
        output: String::new(),
    })?;
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    if done.status.success() {
        return Ok(text);
    }
    let mut all = text;
    all.push_str(&String::from_utf8_lossy(&done.stderr));
    Err(Error::Command { command: name, status: done.status.to_string(), output: last_lines(&all, 8) })
}

/// Program and first arguments of a command, for messages.
pub fn describe(command: &Command) -> String {
    let mut name = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args().take(4) {
        name.push(' ');
        name.push_str(&argument.to_string_lossy());
    }
    name
}

/// The last `count` lines that are not empty, joined with "; ".
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let start = lines.len().saturating_sub(count);
    lines.get(start..).unwrap_or_default().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_is_named_with_the_command_that_installs_it() {
        let error = require(&["sh", "no-such-program-here"]).unwrap_err().to_string();
        assert_eq!(
            error,
            "missing: no-such-program-here; install with: \
             sudo apt-get install --no-install-recommends no-such-program-here"
        );
        require(&["sh"]).unwrap();
    }

    #[test]
    fn a_failed_command_reports_its_last_lines() {
        let error = output(Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"])).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("one; two") && text.contains("exit status: 3"), "{text}");
    }
}
