//! Links between documents of the repository: the file is there, and the heading in it.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use virtio_kfd_images::tool;

/// All findings in the tracked documents of the repository at `root`, as sentences.
pub fn findings(root: &Path) -> Result<Vec<String>> {
    let list = tool::output(Command::new("git").args(["ls-files", "-z"]).current_dir(root))?;
    let mut findings = Vec::new();
    for file in list.split('\0').filter(|file| file.ends_with(".md")) {
        // A tracked file may be gone from the work tree; git says so to whoever commits.
        let Ok(text) = std::fs::read_to_string(root.join(file)) else { continue };
        let directory = root.join(file).parent().map(Path::to_owned).unwrap_or_default();
        for target in targets(&text) {
            let (place, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = if place.is_empty() { root.join(file) } else { directory.join(place) };
            if !path.exists() {
                findings.push(format!("{file}: {target}: there is no such file"));
            } else if !heading.is_empty() {
                let there = std::fs::read_to_string(&path).unwrap_or_default();
                if !headings(&there).contains(heading) {
                    findings.push(format!("{file}: {target}: there is no such heading"));
                }
            }
        }
    }
    Ok(findings)
}

/// What the links of a document name, other than addresses.
fn targets(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (at, opening) in text.match_indices("](") {
        let rest = text.get(at.saturating_add(opening.len())..).unwrap_or_default();
        if let Some((target, _)) = rest.split_once(')')
            && !target.contains("://")
        {
            found.push(target);
        }
    }
    found
}

/// The headings of a document, as links name them: small letters, hyphens for spaces, and no other signs.
fn headings(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut in_code = false;
    for line in text.lines() {
        in_code ^= line.starts_with("```");
        if !in_code && line.starts_with('#') {
            let heading = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
            let is_part = |letter: &char| letter.is_alphanumeric() || *letter == '-' || *letter == '_';
            found.insert(heading.chars().filter(is_part).collect());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_links_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let git =
            |arguments: &[&str]| tool::output(Command::new("git").args(arguments).current_dir(root)).unwrap();
        git(&["init", "-q"]);
        std::fs::create_dir(root.join("docs")).unwrap();
        let first = "# One `two`, three\n[a](docs/b.md#its-heading) [b](#one-two-three) [c](https://example.org/x)\n\
                     [d](docs/b.md#no-heading) [e](missing.md)\n```\n# no heading\n```\n";
        std::fs::write(root.join("a.md"), first).unwrap();
        std::fs::write(root.join("docs/b.md"), "## Its heading\n[f](../a.md) [g](a.md)\n").unwrap();
        git(&["add", "."]);
        let expected = [
            "a.md: docs/b.md#no-heading: there is no such heading",
            "a.md: missing.md: there is no such file",
            "docs/b.md: a.md: there is no such file",
        ];
        assert_eq!(findings(root).unwrap(), expected);
    }
}
