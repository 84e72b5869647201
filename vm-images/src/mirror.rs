//! Where packages come from: the Debian mirror of the system's own apt sources, or of an environment variable.

use std::path::Path;

use crate::error::{Error, Result};

/// The environment variable that names the mirror (the address that stands before `/dists`).
pub const MIRROR_VARIABLE: &str = "VIRTIO_KFD_MIRROR";

/// Suites under which a system's main Debian archive may be entered.
const SUITES: &[&str] = &[
    "bookworm",
    "trixie",
    "forky",
    "duke",
    "sid",
    "oldoldstable",
    "oldstable",
    "stable",
    "testing",
    "unstable",
];

/// The address of the Debian mirror.
///
/// # Errors
/// [`Error::NoMirror`] when neither the variable nor the system's apt sources name one.
pub fn find() -> Result<String> {
    if let Ok(address) = std::env::var(MIRROR_VARIABLE)
        && !address.trim().is_empty()
    {
        return Ok(address.trim().trim_end_matches('/').to_owned());
    }
    in_directory(Path::new("/etc/apt")).ok_or(Error::NoMirror)
}

/// Reads `sources.list` and `sources.list.d` below `apt`, in the order in which apt reads them.
fn in_directory(apt: &Path) -> Option<String> {
    let mut files = vec![apt.join("sources.list")];
    if let Ok(entries) = std::fs::read_dir(apt.join("sources.list.d")) {
        let mut parts: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        parts.sort();
        files.extend(parts);
    }
    let mut sources = Vec::new();
    for file in files {
        let Ok(text) = std::fs::read_to_string(&file) else { continue };
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => sources.extend(text.lines().filter_map(one_line)),
            Some("sources") => sources.extend(deb822(&text)),
            _ => {}
        }
    }
    sources.iter().find_map(Source::debian_archive)
}

/// One entry of the apt sources, whichever format it was written in (sources.list(5)).
#[derive(Debug, Default)]
struct Source {
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

impl Source {
    /// The entry's address if it is Debian's main archive: a known suite without a suffix, component main, and signed by
    /// Debian's keys (or by no key in particular).
    fn debian_archive(&self) -> Option<String> {
        let suite = self.suites.iter().any(|suite| SUITES.contains(&suite.as_str()));
        let main = self.components.iter().any(|component| component == "main");
        let key = self.signed_by.as_deref().is_none_or(|key| key.contains("debian-archive-"));
        if suite && main && key {
            self.uris.first().map(|uri| uri.trim_end_matches('/').to_owned())
        } else {
            None
        }
    }
}

/// Parses a line such as `deb [signed-by=/path arch=amd64] http://host/debian bookworm main`.
fn one_line(line: &str) -> Option<Source> {
    let line = line.split('#').next().unwrap_or_default().trim();
    let rest = line.strip_prefix("deb").filter(|rest| rest.starts_with([' ', '\t']))?.trim_start();
    let mut source = Source::default();
    let rest = match rest.strip_prefix('[') {
        Some(options) => {
            let (options, rest) = options.split_once(']')?;
            source.signed_by = options
                .split_whitespace()
                .find_map(|option| option.strip_prefix("signed-by="))
                .map(str::to_owned);
            rest
        }
        None => rest,
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    source.uris.push(words.next()?);
    source.suites.push(words.next()?);
    source.components.extend(words);
    Some(source)
}

/// Parses the stanzas of a deb822 file; disabled ones and source-only ones are left out.
fn deb822(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for stanza in text.split("\n\n") {
        let mut source = Source::default();
        let (mut binary, mut enabled) = (false, true);
        let mut field = String::new();
        for line in stanza.lines().filter(|line| !line.starts_with('#')) {
            let value = if line.starts_with([' ', '\t']) {
                line.trim()
            } else if let Some((name, value)) = line.split_once(':') {
                field = name.trim().to_ascii_lowercase();
                value.trim()
            } else {
                continue;
            };
            let words = value.split_whitespace().map(str::to_owned);
            match field.as_str() {
                "types" => binary |= value.split_whitespace().any(|kind| kind == "deb"),
                "uris" => source.uris.extend(words),
                "suites" => source.suites.extend(words),
                "components" => source.components.extend(words),
                "enabled" => enabled = !matches!(value.to_ascii_lowercase().as_str(), "no" | "false" | "0"),
                "signed-by" => source.signed_by.get_or_insert_default().push_str(value),
                _ => {}
            }
        }
        if binary && enabled {
            sources.push(source);
        }
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_in(files: &[(&str, &str)]) -> Option<String> {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("sources.list.d")).unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        in_directory(directory.path())
    }

    #[test]
    fn deb822_sources_are_read() {
        let text = "# comment\nTypes: deb deb-src\nURIs: http://mirror.example/debian/\nSuites: trixie trixie-updates\n\
                    Components: main contrib\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n\
                    Types: deb\nURIs: http://mirror.example/debian-security\nSuites: trixie-security\nComponents: main\n";
        assert_eq!(
            find_in(&[("sources.list.d/debian.sources", text)]).unwrap(),
            "http://mirror.example/debian"
        );
    }

    #[test]
    fn one_line_sources_are_read() {
        let text = "# deb http://old.example/debian bookworm main\n\
                    deb-src http://source.example/debian bookworm main\n\
                    deb http://security.example/debian-security bookworm-security main\n\
                    deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] \
                    http://mirror.example/debian bookworm main # the mirror\n";
        assert_eq!(find_in(&[("sources.list", text)]).unwrap(), "http://mirror.example/debian");
    }

    #[test]
    fn third_parties_and_disabled_entries_are_passed_over() {
        let vendor =
            "deb [signed-by=/usr/share/keyrings/vendor.gpg] http://vendor.example/apt bookworm main\n";
        let disabled =
            "Types: deb\nEnabled: no\nURIs: http://off.example/debian\nSuites: bookworm\nComponents: main\n";
        let embedded = "Types: deb\nURIs: http://key.example/apt\nSuites: bookworm\nComponents: main\n\
                        Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n";
        let files = [
            ("sources.list.d/a.list", vendor),
            ("sources.list.d/b.sources", disabled),
            ("sources.list.d/c.sources", embedded),
        ];
        assert_eq!(find_in(&files), None);
    }
}
