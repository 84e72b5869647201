//! What must not stand in the repository: paths of a machine, hosts of a mirror, keys.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use virtio_kfd_images::{mirror, tool};

/// Texts that stand in no tracked file, with the reason. Written in two parts, so that this file does not hold them.
const FORBIDDEN: &[(&str, &str, &str)] = &[
    ("/ho", "me/", "a home directory"),
    ("/Us", "ers/", "a home directory"),
    ("/ro", "ot/.", "a home directory"),
    ("debian.or", "g/debian", "the address of a mirror; it comes from the system's apt sources"),
    ("PRIVATE KE", "Y-----", "a private key"),
];

/// All findings in the tracked files of the repository at `root`, as sentences.
pub fn findings(root: &Path) -> Result<Vec<String>> {
    let list = tool::output(Command::new("git").args(["ls-files", "-z"]).current_dir(root))?;
    let mut forbidden: Vec<(String, &str)> =
        FORBIDDEN.iter().map(|(first, second, reason)| (format!("{first}{second}"), *reason)).collect();
    forbidden.push((root.display().to_string(), "the path of this checkout"));
    if let Some(host) = mirror::find().ok().as_deref().and_then(host) {
        forbidden.push((host.to_owned(), "the host of this machine's mirror"));
    }
    let mut findings = Vec::new();
    for file in list.split('\0').filter(|file| !file.is_empty()) {
        // A tracked file may be gone from the work tree; git says so to whoever commits.
        let Ok(bytes) = std::fs::read(root.join(file)) else { continue };
        let text = String::from_utf8_lossy(&bytes);
        for (number, line) in (1..).zip(text.lines()) {
            for (forbidden, reason) in &forbidden {
                if line.contains(forbidden.as_str()) {
                    findings.push(format!("{file}:{number}: {reason} ({forbidden})"));
                }
            }
        }
    }
    Ok(findings)
}

/// The host in an address such as `http://host:port/path`.
fn host(address: &str) -> Option<&str> {
    let rest = address.split_once("://")?.1;
    let authority = rest.split('/').next()?;
    let host = authority.rsplit('@').next()?.split(':').next()?;
    (!host.is_empty()).then_some(host)
}

/// Checks that git is there and `root` is a checkout.
pub fn possible(root: &Path) -> Result<()> {
    tool::require(&["git"])?;
    tool::output(Command::new("git").args(["rev-parse", "--git-dir"]).current_dir(root))
        .map(drop)
        .context("not a git checkout")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forbidden_text_is_found_with_its_line() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let git =
            |arguments: &[&str]| tool::output(Command::new("git").args(arguments).current_dir(root)).unwrap();
        git(&["init", "-q"]);
        let home = format!("first\nsee {}{}someone\n", "/ho", "me/");
        std::fs::write(root.join("notes"), home).unwrap();
        std::fs::write(root.join("clean"), "nothing here\n").unwrap();
        git(&["add", "."]);
        let found = findings(root).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("notes:2: a home directory"), "{found:?}");
    }

    #[test]
    fn hosts_are_cut_out_of_addresses() {
        assert_eq!(host("http://user@mirror.example:8080/debian"), Some("mirror.example"));
        assert_eq!(host("file:///srv/debian"), None);
    }
}
