//! The direction of dependencies: `dependency-direction.toml` against what cargo resolves.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, PackageId};
use serde::Deserialize;

const RULES: &str = include_str!("../dependency-direction.toml");

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    may: Vec<String>,
    #[serde(default)]
    never: Vec<String>,
}

/// The crates of a workspace and what each depends on at run and build time, by package name.
#[derive(Debug, Default)]
struct Graph {
    members: BTreeSet<String>,
    edges: BTreeMap<String, BTreeSet<String>>,
}

/// All breaches of the rules in the workspace at `root`, as sentences.
pub fn breaches(root: &Path) -> Result<Vec<String>> {
    let rules = toml::from_str(RULES).context("dependency-direction.toml")?;
    let metadata =
        MetadataCommand::new().manifest_path(root.join("Cargo.toml")).exec().context("cargo metadata")?;
    Ok(judge(&graph(&metadata)?, &rules))
}

fn graph(metadata: &Metadata) -> Result<Graph> {
    let name = |id: &PackageId| {
        let package = metadata.packages.iter().find(|package| package.id == *id);
        package.map(|package| package.name.to_string()).unwrap_or_default()
    };
    let resolve = metadata.resolve.as_ref().context("cargo metadata resolved nothing")?;
    let mut graph =
        Graph { members: metadata.workspace_members.iter().map(name).collect(), ..Graph::default() };
    for node in &resolve.nodes {
        let needs = node.deps.iter().filter(|dependency| {
            dependency.dep_kinds.iter().any(|kind| kind.kind != DependencyKind::Development)
        });
        graph.edges.entry(name(&node.id)).or_default().extend(needs.map(|dependency| name(&dependency.pkg)));
    }
    Ok(graph)
}

fn judge(graph: &Graph, rules: &BTreeMap<String, Rule>) -> Vec<String> {
    let mut breaches = Vec::new();
    for name in rules.keys().filter(|name| !graph.members.contains(*name)) {
        breaches.push(format!("{name} has a rule but is no crate of the workspace"));
    }
    for member in &graph.members {
        let Some(rule) = rules.get(member) else {
            breaches.push(format!("{member} has no rule"));
            continue;
        };
        let all = rule.may.iter().any(|name| name == "*");
        for need in graph.edges.get(member).into_iter().flatten() {
            if graph.members.contains(need) && !all && !rule.may.contains(need) {
                breaches
                    .push(format!("{member} depends on {need}; it may depend on: {}", rule.may.join(", ")));
            }
        }
        for forbidden in &rule.never {
            if let Some(path) = path(graph, member, forbidden) {
                breaches
                    .push(format!("{member} must never reach {forbidden}, but does: {}", path.join(" -> ")));
            }
        }
    }
    breaches
}

/// A path of dependencies from one crate to another.
fn path(graph: &Graph, from: &str, to: &str) -> Option<Vec<String>> {
    let mut seen = BTreeSet::from([from.to_owned()]);
    let mut pending = vec![vec![from.to_owned()]];
    while let Some(path) = pending.pop() {
        for next in path.last().and_then(|last| graph.edges.get(last)).into_iter().flatten() {
            let mut longer = path.clone();
            longer.push(next.clone());
            if next == to {
                return Some(longer);
            }
            if seen.insert(next.clone()) {
                pending.push(longer);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_workspace_keeps_the_direction() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        assert_eq!(breaches(root).unwrap(), Vec::<String>::new());
    }

    fn graph(edges: &[(&str, &[&str])]) -> Graph {
        let edges: BTreeMap<String, BTreeSet<String>> = edges
            .iter()
            .map(|(from, to)| ((*from).to_owned(), to.iter().map(|name| (*name).to_owned()).collect()))
            .collect();
        Graph { members: ["daemon", "worker", "wire"].map(str::to_owned).into(), edges }
    }

    #[test]
    fn breaches_are_found() {
        let rules: BTreeMap<String, Rule> = toml::from_str(
            "[daemon]\nmay = [\"wire\"]\nnever = [\"ioctl\"]\n[worker]\nmay = []\n[gone]\nmay = []\n",
        )
        .unwrap();
        let found = judge(
            &graph(&[
                ("daemon", &["wire", "helper"]),
                ("helper", &["ioctl"]),
                ("worker", &["daemon", "serde"]),
            ]),
            &rules,
        );
        assert_eq!(
            found,
            [
                "gone has a rule but is no crate of the workspace",
                "daemon must never reach ioctl, but does: daemon -> helper -> ioctl",
                "wire has no rule",
                "worker depends on daemon; it may depend on: ",
            ]
        );
    }
}
