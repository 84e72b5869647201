//! Environment variables of this project: each that the code knows has a row in one table of the documents, and the other way
//! round.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use virtio_kfd_images::tool;

/// What all their names begin with. Written in two parts, so that this file names none.
const PREFIX: (&str, &str) = ("VIRTIO_", "KFD_");

/// Endings of documents and of what is neither code nor document.
const DOCUMENT: &str = ".md";
const NO_CODE: &[&str] = &[DOCUMENT, ".txt", ".lock"];

/// All findings in the tracked files of the repository at `root`, as sentences.
pub fn findings(root: &Path) -> Result<Vec<String>> {
    let list = tool::output(Command::new("git").args(["ls-files", "-z"]).current_dir(root))?;
    let mut in_code: BTreeMap<String, String> = BTreeMap::new();
    let mut rows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in list.split('\0').filter(|file| !file.is_empty()) {
        // A tracked file may be gone from the work tree; git says so to whoever commits.
        let Ok(bytes) = std::fs::read(root.join(file)) else { continue };
        let text = String::from_utf8_lossy(&bytes);
        if file.ends_with(DOCUMENT) {
            for name in text.lines().flat_map(described) {
                rows.entry(name).or_default().insert(file.to_owned());
            }
        } else if !NO_CODE.iter().any(|ending| file.ends_with(ending)) {
            for name in names(&text) {
                in_code.entry(name).or_insert_with(|| file.to_owned());
            }
        }
    }
    let mut findings = Vec::new();
    for (name, file) in &in_code {
        match rows.get(name).map_or(0, BTreeSet::len) {
            0 => findings.push(format!("{name} of {file} has no row in a table of the documents")),
            1 => {}
            _ => findings.push(format!("{name} has rows in more than one document: {:?}", rows.get(name))),
        }
    }
    for (name, files) in rows.iter().filter(|(name, _)| !in_code.contains_key(*name)) {
        let file = files.first().context("a row without a file")?;
        findings.push(format!("{name} of {file} is not in the code"));
    }
    Ok(findings)
}

/// The variables that a line of a document describes: those in the first cell of a table's row.
fn described(line: &str) -> Vec<String> {
    let cell = line.strip_prefix('|').and_then(|rest| rest.split('|').next());
    cell.map(|cell| names(cell).into_iter().collect()).unwrap_or_default()
}

/// The names in a text.
fn names(text: &str) -> BTreeSet<String> {
    let prefix = format!("{}{}", PREFIX.0, PREFIX.1);
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices(&prefix) {
        let rest = text.get(at..).unwrap_or_default();
        let is_part = |letter: char| letter.is_ascii_uppercase() || letter.is_ascii_digit() || letter == '_';
        let name: String = rest.chars().take_while(|letter| is_part(*letter)).collect();
        // What a format string goes on with is no name.
        if name.len() > prefix.len() && !name.ends_with('_') {
            found.insert(name);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(end: &str) -> String {
        format!("{}{}{end}", PREFIX.0, PREFIX.1)
    }

    #[test]
    fn each_name_in_code_has_one_row_and_each_row_is_in_the_code() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let git =
            |arguments: &[&str]| tool::output(Command::new("git").args(arguments).current_dir(root)).unwrap();
        git(&["init", "-q"]);
        let code =
            format!("(\"{}\", \"{}\", \"{}\", \"{}{{}}\")", name("A"), name("A_B"), name("C"), name("D_"));
        std::fs::write(root.join("main.rs"), code).unwrap();
        let page = |first: &str, second: &str| {
            format!(
                "`{}` in a text\n\n| x | y |\n| `{first}` | `{}` |\n| `{second}` | z |\n",
                name("C"),
                name("C")
            )
        };
        std::fs::write(root.join("a.md"), page(&name("A"), &name("E"))).unwrap();
        std::fs::write(root.join("b.md"), page(&name("A"), &name("A_B"))).unwrap();
        git(&["add", "."]);
        let found = findings(root).unwrap();
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].starts_with(&format!("{} has rows in more than one", name("A"))), "{found:?}");
        assert!(found[1].starts_with(&format!("{} of main.rs has no row", name("C"))), "{found:?}");
        assert!(found[2].starts_with(&format!("{} of a.md is not in the code", name("E"))), "{found:?}");
    }
}
